"""One file per command: its help, its parser and what it does."""

"""What is on disk: schemas, commits, writing and reading. Everything that names a file of a run folder."""

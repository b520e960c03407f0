"""What tests stand on: tiny models and tokenizers, fakes, faults, servers, references. No tests here."""

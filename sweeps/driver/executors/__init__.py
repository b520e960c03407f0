"""Where replicas live: in this process, or as Ray actors."""

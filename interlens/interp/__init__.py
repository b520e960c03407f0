"""Sites, capture, interventions and statistics of activations."""

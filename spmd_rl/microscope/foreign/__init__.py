"""Foreign sides of a comparison: hidden states that another program wrote into a file."""

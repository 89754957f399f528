"""The policy loss and its parts."""

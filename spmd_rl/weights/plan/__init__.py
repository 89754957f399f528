"""Which box of which tensor goes from which rank to which. Pure."""

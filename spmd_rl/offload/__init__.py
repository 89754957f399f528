"""Who owns which bytes, and when."""

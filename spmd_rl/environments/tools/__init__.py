"""Tools of episodes: an interpreter of Python and a shell, which live as long as the episode."""

"""Process of hooks: it imports the functions of the user and runs calls of them."""

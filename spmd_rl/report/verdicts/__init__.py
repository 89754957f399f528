"""What a report says of a run in words: what rose, what is wrong, what differs."""

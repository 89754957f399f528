"""From messages to tokens: chat templates, and what they show."""

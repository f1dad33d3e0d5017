"""What the ranks of a group tell each other before collectives, and what they have agreed on."""

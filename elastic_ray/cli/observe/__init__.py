"""Commands that show what is observed."""

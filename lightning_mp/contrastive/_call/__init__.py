"""What a call of a loss says: brought into one form, and checked before anything is computed."""

"""The page that shows a run, with its assets."""

"""Rules: numbers in, verdicts out. They import torch and never Lightning."""

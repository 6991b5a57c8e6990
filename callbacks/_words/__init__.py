"""All that callbacks say, as whole sentences; knows neither torch nor Lightning."""

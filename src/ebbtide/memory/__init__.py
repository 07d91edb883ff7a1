"""Who holds which bytes in which phase."""

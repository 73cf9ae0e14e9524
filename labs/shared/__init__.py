"""What labs have in common. A file of it that needs no torch imports none."""

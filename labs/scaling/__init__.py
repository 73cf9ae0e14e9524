"""What more ranks bring on this machine: measured, explained, and carried on to more ranks."""

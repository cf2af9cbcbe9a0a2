"""What a rank is started from and what it prints."""

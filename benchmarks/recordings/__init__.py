"""What a terminal shows of a program, recorded from a real run."""

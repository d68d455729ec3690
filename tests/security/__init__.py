"""What an attacker tries: each probe says what is bounded."""

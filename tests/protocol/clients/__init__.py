"""Programs that use Triton's clients as users do, each run in a process of its own by test_real_clients.py."""

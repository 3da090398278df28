"""What each command does; `cli` only wires them up."""

"""Wrong for a proof: it keeps nothing."""

print("trained")

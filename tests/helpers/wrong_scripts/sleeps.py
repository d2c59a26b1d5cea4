"""Wrong for a proof: it never ends."""

import time

print("waiting for the data", flush=True)
time.sleep(600)

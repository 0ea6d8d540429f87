"""What was measured: figures beside something run on the same tasks, and the commands that make them again. No part of the product imports this."""

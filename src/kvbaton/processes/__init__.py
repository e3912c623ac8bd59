"""Starting, watching and ending processes: children with their logs, free ports, and what an operator is told."""

"""Starting, watching and ending processes: children with their logs, free ports, and errors for operators."""

"""Starting ranks and ending them: all of them, whatever happens to one."""

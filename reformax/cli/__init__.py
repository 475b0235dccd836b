"""What the scripts share: flags, gin files and the messages that both give."""

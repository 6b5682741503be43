"""The ground that every other package stands on: errors, words, policies, files, trees, ragged rows, rates."""

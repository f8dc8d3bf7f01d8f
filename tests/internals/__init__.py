"""All that contract tests need of private parts of actckpt: a rebuild changes these files, and no contract test."""

"""What rules on logs share: how they are declared, and findings for absent ranks and unmatched messages."""

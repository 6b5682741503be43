"""Import row 4: model description + mesh + policies -> Plan; the only package that orders the techniques."""

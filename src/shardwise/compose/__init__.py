"""Row 4: model description + mesh + policies -> Plan; the one place where techniques are put in order."""

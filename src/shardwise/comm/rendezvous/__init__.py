"""How the processes of a job find one another: seats, hosts, job names, the store, and the handshake."""

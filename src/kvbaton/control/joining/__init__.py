"""Membership without a file: a process makes its own key, proves a join token, and is let in for a bounded time.

    member                               join door (beside a registry)                 peers
      | CURVE, the door's key from the token |                                            |
      |-- Join: token id, name, role, proof ->| token good, use counted on disk           |
      |<- Admitted: certificate, cluster card-| member written to DIR/joined              |
      |                                       |                                           |
      |-- Register, Ping -------------------->| registry ------- directory + certificate ->| checks it, lets in
      |<- certificate renewed, ticket keys ---|                                           |
      |                                       |                                           |
      |-- Present: certificate -------------->| another registry's door: the same, without the token

Laws. The *token* proves that an operator wants members of one role; the *certificate*, signed by the admission key that
only registries hold, proves to everybody else which CURVE key has which name and role. A name and a role come from a
verified certificate or a key directory, never from a message alone. A certificate without its CURVE key is useless: it
is looked at only on, or for, a connection that has proven that key. A minted identity is never displaced.
"""

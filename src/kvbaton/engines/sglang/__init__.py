"""SGLang as an engine: a transfer backend of its prefill-decode disaggregation, put in by its plug-in entry point.

SGLang's interface is push-shaped (P sends into pages that D announced). Under it works kvbaton's *stream*: D reads
behind P, so that nobody but D ever writes D's pages.

    SGLang                              here
    KVArgs                              `sglang_layout`: each buffer a layer of the protocol, 64 of them a rank
    metadata buffers (first token, …)   `metadata_rows`: a row of our own for each slot, handed over last, as a state is
    Sender: made, poll                  accepted; Bootstrapping until its pages may be pinned, then WaitingForInput
    Sender.init, send                   begun; scheduled and computed; the last one writes the row
    Sender.poll                         Success on D's commit; Failed once the lease is over without one
    Receiver: made, init                want, by a ticket that both sides make of the room
    Receiver.poll                       Bootstrapping until P has begun: before it D gives up no page
    Receiver.send_metadata              allocated
    Receiver.poll                       Success after the commit, with the row; Failed when no read can land any more
    abort                               the source ended, or D gave up; the end still comes by `poll`
    KVBootstrapServer                   `bootstrap_stub`: answers that it is there; peers are found as everywhere
    HiCacheStorage                          `hicache_store`: its flat pages as values of the shared store
    pages handed to the allocator       `plugin`: their epochs rise before anybody can be given them

Laws: all of it runs on the scheduler's thread, and nothing waits there. SGLang owns its pages: it holds them while
`poll` says nothing final, which is this engine's pin. Where it lets them go all the same, the epochs end the lease.
What is not handed over is refused when the engine starts, or with its request, by name.
"""

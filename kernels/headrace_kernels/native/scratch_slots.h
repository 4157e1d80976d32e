// Who uses which slot of thread_scratch; two users that can be active in one thread at once have different slots.
#ifndef HEADRACE_SCRATCH_SLOTS_H
#define HEADRACE_SCRATCH_SLOTS_H

namespace hr {

enum ScratchSlot {
  SLOT_PACKED_ROWS,  // of the calling thread: activations in strips
  SLOT_QUANTISED_ROWS,  // the same in bytes
  SLOT_TILE,         // a product's sums, before the epilogue
  SLOT_UNPACKED,     // one block of a quantised panel
  SLOT_ATTENTION,    // outputs and scores of a task
  SLOT_KEYS,
  SLOT_ROW,
  SLOT_STEP,         // of the calling thread: a decoder step's activations
};

}  // namespace hr

#endif

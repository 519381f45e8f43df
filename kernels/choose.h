// Which instruction set runs.
#pragma once
#include "kernels.h"

namespace spaceport {

// The kernels named by the environment variable SPACEPORT_KERNELS, else the fastest that this processor has.
// Null where the variable names none of them: `message` then says what there is.
const Kernels* choose_kernels(char* message, size_t size);

// The names of all kernels that this processor has, the fastest first, with commas between them.
void list_kernels(char* names, size_t size);

}  // namespace spaceport

// The kernels for one instruction set: compiled once for each, with SPACEPORT_SET as its name.
#include <initializer_list>

#include "kernels.h"
#include "scratch.h"

#define SPACEPORT_STRING_OF(name) #name
#define SPACEPORT_STRING(name) SPACEPORT_STRING_OF(name)

#include SPACEPORT_VECTOR

#include "arithmetic.h"
#include "rounding.h"
#include "product.h"
#include "attention.h"

namespace spaceport::SPACEPORT_SET {

extern const Kernels KERNELS;
const Kernels KERNELS = {SPACEPORT_STRING(SPACEPORT_SET),
                         {TILE_ROWS_8, TILE_ROWS_4},
                         round_tile,
                         product,
                         unpack_row,
                         store_rows,
                         attend,
                         attend_scratch};

}  // namespace spaceport::SPACEPORT_SET

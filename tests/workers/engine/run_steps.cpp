// Runs steps of our CPU kernels that test_neon.py has laid out in the memory of its process.
//
// Input: regions of that memory, each as address, size, kind and bytes. The first is the model. Output:
// the logits of every step, in order. Steps use one and two threads in turns.

#include "step_kernels.cpp"

#include <cstdio>
#include <vector>

enum Kind : uint64_t { NUMBERS, POINTERS, STEP };

struct Region {
  uint64_t address, size, kind;
  char *memory;
};

int main() {
  std::vector<Region> regions;
  for (Region region; std::fread(&region, 24, 1, stdin) == 1; regions.push_back(region)) {
    region.memory = static_cast<char *>(std::aligned_alloc(64, (region.size + 127) / 64 * 64));
    if (std::fread(region.memory, 1, region.size, stdin) != region.size)
      return 1;
  }
  for (const Region &holder : regions)
    for (uint64_t i = 0; holder.kind != NUMBERS && i + 8 <= holder.size; i += 8) {
      uint64_t &word = *reinterpret_cast<uint64_t *>(holder.memory + i);
      const uint64_t address = word;
      for (const Region &region : regions)
        if (address - region.address < region.size)
          word = reinterpret_cast<uint64_t>(region.memory) + address - region.address;
    }
  const auto *model = reinterpret_cast<const Model *>(regions[0].memory);
  int threads = 1;
  for (const Region &region : regions)
    if (region.kind == STEP) {
      const auto *step = reinterpret_cast<const Step *>(region.memory);
      paceline_step(model, step, threads);
      threads = 3 - threads;
      std::fwrite(step->logits, 4, size_t(step->num_logits * model->head.outputs), stdout);
    }
}

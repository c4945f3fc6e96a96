// Single queries of any dtype by ranges of keys. Included inside the namespace of an ISA and a dtype, which has
//   using Element: what q, k, v and out are made of
//   void add_block(Partial&, const Attention&, int batch, int head, int begin, int keys, const Element* next): a query, a
//     block, and the keys after it
//   void store_row(Element* out, const float* y, int dim)

inline const Element* keys_at(const Attention& a, int batch, int kv_head, int key) {
  return static_cast<const Element*>(a.k) + offset(a.k_stride, batch, kv_head, key);
}

// What is read after the block at `key` of a range from `begin` on: the next block, or the next head's first. It is
// asked for early, and nothing else is: hidden keys are as far away as others.
inline const Element* keys_after(const Attention& a, int batch, int kv_head, int begin, int key, int end) {
  if (key + kKeyBlock < end) return keys_at(a, batch, kv_head, key + kKeyBlock);
  if (kv_head + 1 < a.kv_heads) return keys_at(a, batch, kv_head + 1, begin);
  return batch + 1 < a.batch ? keys_at(a, batch + 1, 0, begin) : keys_at(a, batch, kv_head, key);
}

// All query heads of a KV head over keys [begin, end): a block of keys stays in the cache for all of them.
inline void attend_range(const Attention& a, int batch, int kv_head, int range, int ranges, int begin,
                         int end) {
  const int shared = a.heads / a.kv_heads;
  for (int i = 0; i < shared; ++i) {
    Partial p = partial_at(a, batch * a.heads + kv_head * shared + i, range, ranges);
    p.highest = -INFINITY;
    p.sum = 0;
    memset(p.out, 0, sizeof(float) * a.head_dim);
    store_partial(p);
  }
  for (int key = begin; key < end; key += kKeyBlock)
    for (int i = 0; i < shared; ++i) {
      const int head = kv_head * shared + i;
      Partial p = partial_at(a, batch * a.heads + head, range, ranges);
      const Element* next =
          i + 1 < shared ? keys_at(a, batch, kv_head, key) : keys_after(a, batch, kv_head, begin, key, end);
      add_block(p, a, batch, head, key, std::min(kKeyBlock, end - key), next);
      store_partial(p);
    }
}

// The ranges of one query head to its result.
inline void merge_ranges(const Attention& a, int batch, int head, int ranges) {
  float highest = -INFINITY, sum = 0, share[kMaxRanges];
  for (int r = 0; r < ranges; ++r)
    highest = std::max(highest, partial_at(a, batch * a.heads + head, r, ranges).highest);
  for (int r = 0; r < ranges; ++r) {
    const Partial p = partial_at(a, batch * a.heads + head, r, ranges);
    share[r] = p.highest == -INFINITY ? 0 : exp2f(p.highest - highest);
    sum += share[r] * p.sum;
  }
  float y[kMaxHeadDim] = {};
  for (int r = 0; r < ranges; ++r) {
    const float* part = partial_at(a, batch * a.heads + head, r, ranges).out;
    for (int d = 0; d < a.head_dim; ++d) y[d] += share[r] * part[d];
  }
  const float factor = sum == 0 ? 0 : 1 / sum;
  for (int d = 0; d < a.head_dim; ++d) y[d] *= factor;
  store_row(static_cast<Element*>(a.out) + offset(a.out_stride, batch, head, 0), y, a.head_dim);
}

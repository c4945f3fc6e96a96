// Messages and collectives in the background, random but planned alike on all ranks.
// Usage: test_messages WORLD ROUNDS SEED
#include <errno.h>
#include <string.h>

#include <atomic>

#include "harness.h"

namespace {

struct Message {
  int from, to, tag;
  size_t bytes;
  int number;
};

char byte_of(const Message& m, size_t i) {
  return static_cast<char>(m.number * 31 + static_cast<int>(i % 97));
}

std::vector<char> contents(const Message& m) {
  std::vector<char> data(m.bytes);
  for (size_t i = 0; i < m.bytes; ++i) data[i] = byte_of(m, i);
  return data;
}

// Every rank posts its receives and sends of one plan in an order of its own, then waits for all.
void exchange(int rank, NdGroup* group, const std::vector<Message>& plan, std::mt19937& rng,
              bool background) {
  struct Posted {
    const Message* message;
    std::vector<char> data;
    NdRequest* request;
  };
  std::vector<Posted> posted;
  for (const Message& m : plan) {
    if (m.to == rank) posted.push_back({&m, std::vector<char>(m.bytes), nullptr});
    if (m.from == rank) posted.push_back({&m, contents(m), nullptr});
  }
  // Messages of one pair and tag keep their order, so only blocks of different tags are shuffled.
  std::vector<int> tags = {0, 1, 2};
  std::shuffle(tags.begin(), tags.end(), rng);
  for (const int tag : tags)
    for (Posted& p : posted) {
      const Message& m = *p.message;
      if (m.tag != tag) continue;
      dawdle(rng);
      const bool sends = m.from == rank;
      const int code =
          sends ? nd_send_start(group, p.data.data(), m.bytes, ND_U8, m.to, m.tag, background, &p.request)
                : nd_recv_start(group, p.data.data(), m.bytes, ND_U8, m.from, m.tag, background, &p.request);
      CHECK_EQ(code, 0, "start of message %d", m.number);
    }
  for (Posted& p : posted) {
    CHECK_EQ(nd_message_wait(group, p.request, 0), 0, "rank %d message %d", rank, p.message->number);
    for (size_t i = 0; p.message->to == rank && i < p.message->bytes; ++i)
      CHECK_EQ(p.data[i], byte_of(*p.message, i), "message %d of %zu bytes at %zu", p.message->number,
               p.message->bytes, i);
    CHECK_EQ(nd_message_free(group, p.request), 0, "free");
  }
}

std::vector<Message> make_plan(int world, std::mt19937& rng, int* number) {
  std::vector<Message> plan;
  for (unsigned n = 1 + rng() % 12; n > 0; --n) {
    Message m;
    m.from = static_cast<int>(rng() % static_cast<unsigned>(world));
    m.to = static_cast<int>(rng() % static_cast<unsigned>(world));
    m.tag = static_cast<int>(rng() % 3);
    m.bytes = pick_bytes(rng) | (rng() & 1);
    m.number = (*number)++;
    if (m.from != m.to) plan.push_back(m);
  }
  return plan;
}

void random_messages(int world, int rounds, unsigned seed) {
  run_ranks(world, [&](int rank, NdGroup* group) {
    std::mt19937 shared(seed), own(seed + 100 + static_cast<unsigned>(rank));
    int number = 0;
    for (int n = 0; n < rounds; ++n) {
      const std::vector<Message> plan = make_plan(world, shared, &number);
      exchange(rank, group, plan, own, shared() % 2);
      if (shared() % 4 == 0) CHECK_EQ(nd_barrier(group), 0, "round %d", n);
    }
  });
}

// Rank 0 takes one message of each peer from whoever comes first.
void receive_from_anyone(int world) {
  run_ranks(world, [&](int rank, NdGroup* group) {
    NdRequest* request = nullptr;
    uint64_t bytes = 0;
    int dtype = 0;
    int value = rank;
    if (rank != 0) {
      CHECK_EQ(nd_send_start(group, &value, sizeof value, ND_I32, 0, 5, 0, &request), 0, "send");
      CHECK_EQ(nd_message_wait(group, request, 0), 0, "send");
      CHECK_EQ(nd_message_free(group, request), 0, "free");
    }
    int sum = 0;
    for (int n = 1; rank == 0 && n < world; ++n) {
      CHECK_EQ(nd_recv_start(group, &value, sizeof value, ND_I32, -1, 5, 0, &request), 0, "recv");
      CHECK_EQ(nd_message_wait(group, request, 0), 0, "recv");
      CHECK_EQ(nd_message_source(request, &bytes, &dtype), value, "the source is who sent the value");
      CHECK_EQ(bytes, sizeof value, "size");
      CHECK_EQ(dtype, ND_I32, "dtype");
      CHECK_EQ(nd_message_free(group, request), 0, "free");
      sum += value;
    }
    if (rank == 0) CHECK_EQ(sum, world * (world - 1) / 2, "each peer once");
    CHECK_EQ(nd_barrier(group), 0, "end");
  });
}

void wrong_size_or_dtype_fails_the_receive_alone() {
  run_ranks(2, [&](int rank, NdGroup* group) {
    char data[64] = {};
    const struct {
      size_t bytes;
      int dtype;
    } asked[] = {{64, ND_U8}, {32, ND_F32}, {32, ND_U8}};
    for (const auto& [bytes, dtype] : asked) {
      NdRequest* request = nullptr;
      if (rank == 0)
        CHECK_EQ(nd_send_start(group, data, 32, ND_U8, 1, 0, 0, &request), 0, "send");
      else
        CHECK_EQ(nd_recv_start(group, data, bytes, dtype, 0, 0, 0, &request), 0, "recv");
      const int wanted = rank == 1 && (bytes != 32 || dtype != ND_U8) ? -EMSGSIZE : 0;
      CHECK_EQ(nd_message_wait(group, request, 0), wanted, "rank %d, %zu bytes", rank, bytes);
      CHECK_EQ(nd_message_free(group, request), 0, "free");
    }
    CHECK_EQ(nd_barrier(group), 0, "the group goes on");
  });
}

// A send in the background ends while both ranks are in calls that wait for each other through it.
void background_send_needs_no_call() {
  run_ranks(2, [&](int rank, NdGroup* group) {
    std::vector<char> data(1 << 20, static_cast<char>(rank));
    NdRequest* request = nullptr;
    if (rank == 0) {
      CHECK_EQ(nd_send_start(group, data.data(), data.size(), ND_U8, 1, 0, 1, &request), 0, "send");
      CHECK_EQ(nd_barrier(group), 0, "barrier");
      CHECK_EQ(nd_message_wait(group, request, 0), 0, "send");
    } else {
      CHECK_EQ(nd_recv_start(group, data.data(), data.size(), ND_U8, 0, 0, 0, &request), 0, "recv");
      CHECK_EQ(nd_message_wait(group, request, 0), 0, "recv");
      CHECK_EQ(data[12345], 0, "data of rank 0");
      CHECK_EQ(nd_barrier(group), 0, "barrier");
    }
    CHECK_EQ(nd_message_free(group, request), 0, "free");
  });
}

void receive_from_a_closed_rank_is_lost() {
  run_ranks(2, [&](int rank, NdGroup* group) {
    if (rank == 0) return;
    char byte = 0;
    NdRequest* request = nullptr;
    CHECK_EQ(nd_recv_start(group, &byte, 1, ND_U8, 0, 0, 0, &request), 0, "recv");
    CHECK_EQ(nd_message_wait(group, request, 0), -EOWNERDEAD, "recv");
    CHECK_EQ(nd_message_free(group, request), 0, "free");
  });
}

// A poll that ends early leaves the group as it was; the receive can be taken back, and the message goes to the next.
void receive_can_be_withdrawn() {
  run_ranks(2, [&](int rank, NdGroup* group) {
    int value = 5;
    NdRequest* request = nullptr;
    if (rank == 1) {
      CHECK_EQ(nd_recv_start(group, &value, sizeof value, ND_I32, 0, 0, 0, &request), 0, "recv");
      // Of many lengths around what is spun: the clock must nowhere run out between two looks at it.
      for (uint64_t ns = 0; ns < 40000; ns += 20)
        CHECK_EQ(nd_message_poll(group, request, ns), 1, "nothing was sent yet, polled for %d ns",
                 static_cast<int>(ns));
      CHECK_EQ(nd_message_free(group, request), 0, "withdraw");
    }
    CHECK_EQ(nd_barrier(group), 0, "rank %d", rank);
    if (rank == 0)
      CHECK_EQ(nd_send_start(group, &value, sizeof value, ND_I32, 1, 0, 0, &request), 0, "send");
    else
      CHECK_EQ(nd_recv_start(group, &value, sizeof value, ND_I32, 0, 0, 0, &request), 0, "recv");
    CHECK_EQ(nd_message_wait(group, request, 0), 0, "rank %d", rank);
    CHECK_EQ(nd_message_free(group, request), 0, "rank %d", rank);
    CHECK_EQ(value, 5, "rank %d", rank);
  });
}

// Many started sums, some direct ones between; the direct ones wait their turn.
void sums_in_the_background(int world, int rounds, unsigned seed) {
  run_ranks(world, [&](int rank, NdGroup* group) {
    std::mt19937 shared(seed), own(seed + 7 + static_cast<unsigned>(rank));
    for (int n = 0; n < rounds; ++n) {
      const size_t num_tasks = shared() % 5;
      std::vector<std::vector<int>> data;
      std::vector<NdTask*> tasks(num_tasks);
      for (size_t i = 0; i < num_tasks; ++i) {
        data.emplace_back(1 + shared() % 30000, rank + static_cast<int>(i));
        NdArguments a{};
        a.coll = ND_ALL_REDUCE;
        a.dtype = ND_I32;
        a.op = ND_SUM;
        a.in = a.out = data[i].data();
        a.count = data[i].size();
        CHECK_EQ(nd_task_start(group, &a, &tasks[i]), 0, "start");
        dawdle(own);
      }
      int x = 1;
      CHECK_EQ(nd_all_reduce(group, &x, &x, 1, ND_I32, ND_SUM), 0, "direct");
      CHECK_EQ(x, world, "direct");
      for (size_t i = 0; i < num_tasks; ++i) {
        int code = 1;
        CHECK_EQ(nd_task_wait(group, tasks[i], 0, &code), 0, "a direct call waits for those before it");
        CHECK_EQ(code, 0, "task");
        const int sum = world * (world - 1) / 2 + world * static_cast<int>(i);
        for (const int value : data[i]) CHECK_EQ(value, sum, "rank %d task %zu", rank, i);
        CHECK_EQ(nd_task_free(group, tasks[i]), 0, "free");
      }
    }
  });
}

// A small sum that was started gives peers what they wait for, whatever its own rank does before it waits; then the
// rank waits, or asks until it is done, or starts a large one behind it.
void small_sums_need_no_wait_for_peers(int world) {
  for (int then = 0; then < 3; ++then) {
    std::atomic<int> finished{0};
    run_ranks(world, [&](int rank, NdGroup* group) {
      int x = rank;
      NdArguments a{};
      a.coll = ND_ALL_REDUCE;
      a.dtype = ND_I32;
      a.op = ND_SUM;
      a.in = a.out = &x;
      a.count = 1;
      if (rank != 0) {
        CHECK_EQ(nd_run(group, &a), 0, "rank %d", rank);
        ++finished;
      }
      std::vector<int> large(100000, 1);
      NdTask *task = nullptr, *behind = nullptr;
      int code = 1;
      if (rank == 0) {
        CHECK_EQ(nd_task_start(group, &a, &task), 0, "start");
        while (finished < world - 1) std::this_thread::yield();
      }
      if (then == 2) {
        a.in = a.out = large.data();
        a.count = large.size();
        CHECK_EQ(nd_task_start(group, &a, &behind), 0, "start");
        CHECK_EQ(nd_task_wait(group, behind, ND_FOREVER, &code), 0, "wait");
        CHECK_EQ(code, 0, "the large sum");
        for (const int value : large) CHECK_EQ(value, world, "rank %d", rank);
        CHECK_EQ(nd_task_free(group, behind), 0, "free");
      }
      if (rank == 0) {
        if (then == 1)
          while (nd_task_wait(group, task, 0, &code) == -ETIMEDOUT) std::this_thread::yield();
        else
          CHECK_EQ(nd_task_wait(group, task, ND_FOREVER, &code), 0, "wait");
        CHECK_EQ(code, 0, "task");
        CHECK_EQ(nd_task_free(group, task), 0, "free");
      }
      CHECK_EQ(x, world * (world - 1) / 2, "rank %d, then %d", rank, then);
    });
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const int world = atoi(argv[1]), rounds = atoi(argv[2]);
  const unsigned seed = static_cast<unsigned>(atoi(argv[3]));
  random_messages(world, rounds, seed);
  receive_from_anyone(world);
  wrong_size_or_dtype_fails_the_receive_alone();
  background_send_needs_no_call();
  receive_from_a_closed_rank_is_lost();
  receive_can_be_withdrawn();
  sums_in_the_background(world, rounds, seed);
  small_sums_need_no_wait_for_peers(world);
  printf("ok: %d rounds on %d ranks\n", rounds, world);
  return 0;
}

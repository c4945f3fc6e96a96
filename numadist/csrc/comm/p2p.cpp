// Messages between two ranks. Whoever waits for a message moves all messages of its rank on (progress); a
// thread does so for requests in the background.
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <condition_variable>
#include <new>

#include "comm/sync.h"

struct NdRequest {
  NdRequest* next;
  NdCall call;  // root: the peer, -1 any
  int tag;
  char* data;
  uint64_t done;   // bytes moved, of a send; in a receive only the final count
  int came_dtype;  // of a receive: what the sender named
  bool started;    // a send whose head is written
  int source;
  std::atomic<int> state;  // 1: running; else the final code
};

namespace nd {
namespace {

constexpr uint64_t kYieldNs = 1000 * 1000;

struct MessageHead {
  uint64_t bytes;
  int32_t tag;
  int32_t dtype;
};
static_assert(sizeof(MessageHead) <= kMessageUnit);

struct List {
  NdRequest* first = nullptr;
  NdRequest** last = &first;
  void push(NdRequest* r) {
    r->next = nullptr;
    *last = r;
    last = &r->next;
  }
  void remove(NdRequest** at) {
    NdRequest* r = *at;
    *at = r->next;
    if (last == &r->next) last = at;
  }
};

// A message that nobody had asked for when it came.
struct Parcel {
  Parcel* next;
  MessageHead head;
  char* data;
};

// What is coming in from one peer.
struct Incoming {
  uint64_t position = 0;  // of the stream
  bool active = false;    // a message is under way
  MessageHead head{};
  uint64_t done = 0;             // bytes of it
  NdRequest* request = nullptr;  // who gets it
  Parcel* parcel = nullptr;      // or where it is kept
  Parcel* first = nullptr;       // whole messages kept, in order
  Parcel** last = &first;
};

struct Outgoing {
  uint64_t position = 0;
  List sends;
};

uint64_t padded(uint64_t bytes) { return (bytes + kMessageUnit - 1) / kMessageUnit * kMessageUnit; }

}  // namespace

struct Mail {
  std::mutex mutex;
  Incoming* in;
  Outgoing* out;
  List receives;  // posted, not matched yet
  int num_running = 0;
  bool has_thread = false;
  bool stop = false;
  pthread_t thread;
  std::condition_variable work;  // for the thread: something runs, or stop
};

namespace {

void finish(Mail& mail, NdRequest* r, int code) {
  --mail.num_running;
  // release: the data is there for who sees the state.
  r->state.store(code, std::memory_order_release);
}

void ring(NdGroup& g, int rank) {
  Bell& bell = g.parts[rank].control.mail;
  // seq_cst: see sleep_on. On x86 any fetch_add is; elsewhere the look could come first and miss a sleeper.
  bell.value.fetch_add(1, std::memory_order_seq_cst);
  if (bell.sleepers.load(std::memory_order_seq_cst) != 0) wake_sleepers(bell);
}

// Copy between a buffer and a stream, which wraps around.
void to_stream(Channel& c, uint64_t position, const char* src, size_t n) {
  const size_t at = position % kChannelBytes, first = std::min(n, kChannelBytes - at);
  if (first != 0) memcpy(c.data + at, src, first);
  if (n > first) memcpy(c.data, src + first, n - first);
}

void from_stream(const Channel& c, uint64_t position, char* dst, size_t n) {
  const size_t at = position % kChannelBytes, first = std::min(n, kChannelBytes - at);
  if (first != 0) memcpy(dst, c.data + at, first);
  if (n > first) memcpy(dst + first, c.data, n - first);
}

// Write as much to one peer as its channel takes.
void progress_sends(NdGroup& g, Mail& mail, int peer) {
  Outgoing& out = mail.out[peer];
  if (out.sends.first == nullptr) return;
  Channel& c = channel(g, g.rank, peer);
  const uint64_t begin = out.position;
  // acquire: the receiver is done with what it counts as read.
  const uint64_t end = c.read.load(std::memory_order_acquire) + kChannelBytes;
  while (NdRequest* r = out.sends.first) {
    if (!r->started) {
      if (end - out.position < kMessageUnit) break;
      const MessageHead head{r->call.bytes, r->tag, r->call.dtype};
      to_stream(c, out.position, reinterpret_cast<const char*>(&head), sizeof head);
      out.position += kMessageUnit;
      r->started = true;
    }
    const size_t n = std::min<uint64_t>(r->call.bytes - r->done, end - out.position);
    if (n != 0) to_stream(c, out.position, r->data + r->done, n);
    r->done += n;
    out.position += n;
    if (r->done < r->call.bytes) break;
    out.position = padded(out.position);
    out.sends.remove(&out.sends.first);
    finish(mail, r, 0);
  }
  if (out.position == begin) return;
  c.written.store(out.position, std::memory_order_release);
  ring(g, peer);
}

bool matches(const NdRequest& r, int source, int tag) {
  return (r.call.root == source || r.call.root < 0) && r.tag == tag;
}

int fit_code(const NdRequest& r, const MessageHead& head) {
  return head.bytes == r.call.bytes && head.dtype == r.call.dtype ? 0 : -EMSGSIZE;
}

NdRequest* take_receive(Mail& mail, int source, int tag) {
  for (NdRequest** at = &mail.receives.first; *at != nullptr; at = &(*at)->next) {
    NdRequest* r = *at;
    if (!matches(*r, source, tag)) continue;
    mail.receives.remove(at);
    r->source = source;
    return r;
  }
  return nullptr;
}

// A message begins: find who wants it, or keep it. -ENOMEM if it cannot be kept.
int begin_message(Mail& mail, Incoming& in, int source) {
  in.done = 0;
  in.parcel = nullptr;
  in.request = take_receive(mail, source, in.head.tag);
  in.active = true;
  if (in.request != nullptr) return 0;
  in.parcel = static_cast<Parcel*>(malloc(sizeof(Parcel) + in.head.bytes));
  if (in.parcel == nullptr) {
    in.active = false;
    return -ENOMEM;
  }
  *in.parcel = Parcel{nullptr, in.head, reinterpret_cast<char*>(in.parcel + 1)};
  return 0;
}

void end_message(Mail& mail, Incoming& in, int source) {
  in.active = false;
  if (in.request != nullptr) {
    in.request->done = in.head.bytes;
    in.request->came_dtype = in.head.dtype;
    finish(mail, in.request, fit_code(*in.request, in.head));
  } else if (NdRequest* r = take_receive(mail, source, in.head.tag)) {  // posted while the message came
    r->done = in.head.bytes;
    r->came_dtype = in.head.dtype;
    if (fit_code(*r, in.head) == 0 && in.head.bytes != 0) memcpy(r->data, in.parcel->data, in.head.bytes);
    finish(mail, r, fit_code(*r, in.head));
    free(in.parcel);
  } else {
    *in.last = in.parcel;
    in.last = &in.parcel->next;
  }
  in.request = nullptr;
  in.parcel = nullptr;
}

// Take what one peer has written.
int progress_receives(NdGroup& g, Mail& mail, int peer) {
  Incoming& in = mail.in[peer];
  Channel& c = channel(g, peer, g.rank);
  const uint64_t begin = in.position;
  // acquire: pairs with the sender's release.
  const uint64_t end = c.written.load(std::memory_order_acquire);
  int code = 0;
  while (in.position < end) {
    if (!in.active) {
      from_stream(c, in.position, reinterpret_cast<char*>(&in.head), sizeof in.head);
      code = begin_message(mail, in, peer);
      if (code != 0) break;
      in.position += kMessageUnit;
    }
    const size_t n = std::min<uint64_t>(in.head.bytes - in.done, end - in.position);
    const bool fits = in.request == nullptr || fit_code(*in.request, in.head) == 0;
    char* to = in.request != nullptr ? in.request->data : in.parcel->data;
    if (fits && n != 0) from_stream(c, in.position, to + in.done, n);
    in.done += n;
    in.position += n;
    if (in.done < in.head.bytes) break;
    in.position = padded(in.position);
    end_message(mail, in, peer);
  }
  if (in.position == begin) return code;
  c.read.store(in.position, std::memory_order_release);
  ring(g, peer);
  return code;
}

// Move all messages of this rank on as far as they go; a failed group moves none. Call with the lock.
int progress(NdGroup& g, Mail& mail) {
  int code = g.failed.load(std::memory_order_acquire);
  for (int p = 0; p < g.world && code == 0; ++p) {
    progress_sends(g, mail, p);
    code = progress_receives(g, mail, p);
  }
  return code;
}

// From a kept message, if there is one that fits.
bool receive_kept(NdGroup& g, Mail& mail, NdRequest* r) {
  for (int s = 0; s < g.world; ++s) {
    const int source = (g.rank + s) % g.world;
    Incoming& in = mail.in[source];
    for (Parcel** at = &in.first; *at != nullptr; at = &(*at)->next) {
      Parcel* parcel = *at;
      if (!matches(*r, source, parcel->head.tag)) continue;
      const int code = fit_code(*r, parcel->head);
      if (code == 0 && r->call.bytes != 0) memcpy(r->data, parcel->data, r->call.bytes);
      r->source = source;
      r->done = parcel->head.bytes;
      r->came_dtype = parcel->head.dtype;
      *at = parcel->next;
      if (in.last == &parcel->next) in.last = at;
      free(parcel);
      finish(mail, r, code);
      return true;
    }
  }
  return false;
}

NdReport report_of(const NdRequest& r, int code, int peer) {
  return NdReport{code, 0, peer, 0, 0, r.call, NdCall{}};
}

// Reasons to give up a request; 0: go on. A receive from anyone is hopeless when everyone is gone.
int check_request(NdGroup& g, NdRequest& r, uint64_t deadline) {
  if (g.header->abort.load(std::memory_order_acquire) != kRunning) return adopt_abort(g);
  if (now_ns() >= deadline) return fail(g, report_of(r, -ETIMEDOUT, r.call.root));
  int num_gone = 0, gone = -1;
  for (int p = 0; p < g.world; ++p) {
    if (p == g.rank || (r.call.root >= 0 && p != r.call.root) || !is_gone(g, p)) continue;
    ++num_gone;
    gone = p;
  }
  if (num_gone == 0 || (r.call.root < 0 && num_gone < g.world - 1)) return 0;
  // It may have written its last message just before it left.
  const std::lock_guard<std::mutex> lock(g.mail->mutex);
  const int code = progress(g, *g.mail);
  if (code != 0 || r.state.load(std::memory_order_acquire) != 1) return code;
  return fail(g, report_of(r, -EOWNERDEAD, gone));
}

void* run_in_background(void* argument) {
  NdGroup& g = *static_cast<NdGroup*>(argument);
  Mail& mail = *g.mail;
  Bell& bell = g.parts[g.rank].control.mail;
  std::unique_lock<std::mutex> lock(mail.mutex);
  for (;;) {
    mail.work.wait(lock, [&] { return mail.stop || mail.num_running > 0; });
    if (mail.stop) return nullptr;
    const uint64_t seen = bell.value.load(std::memory_order_acquire);
    const int code = progress(g, mail);
    lock.unlock();
    // Requests of a failed group stay as they are; whoever waits for them sees the failure.
    if (code != 0) return nullptr;
    sleep_on(bell, seen);
    lock.lock();
  }
}

int start(NdGroup* group, NdCall call, char* data, int tag, int background, NdRequest** out) {
  NdGroup& g = *group;
  if (g.magic != kMagic) return -ECHILD;
  if (call.root < -1 || call.root >= g.world || (call.coll == ND_SEND && call.root < 0)) return -EINVAL;
  if (const int code = g.failed.load(std::memory_order_acquire)) return code;
  auto* r = new (std::nothrow) NdRequest{nullptr, call, tag, data, 0, 0, false, -1, {1}};
  if (r == nullptr) return -ENOMEM;
  Mail& mail = *g.mail;
  const std::lock_guard<std::mutex> lock(mail.mutex);
  if (background && !mail.has_thread) {
    const int code = pthread_create(&mail.thread, nullptr, run_in_background, group);
    mail.has_thread = code == 0;
    if (code != 0) {
      delete r;
      return -code;
    }
  }
  ++mail.num_running;
  if (g.trace != nullptr) g.trace->add(call, 0, 0);
  *out = r;
  if (call.coll == ND_SEND)
    mail.out[call.root].sends.push(r);
  else if (!receive_kept(g, mail, r))
    mail.receives.push(r);
  const int code = progress(g, mail);
  if (background && mail.num_running > 0) mail.work.notify_one();
  return code;
}

}  // namespace

int open_mail(NdGroup& g) {
  auto* mail = new (std::nothrow) Mail;
  if (mail == nullptr) return -ENOMEM;
  mail->in = new (std::nothrow) Incoming[static_cast<size_t>(g.world)];
  mail->out = new (std::nothrow) Outgoing[static_cast<size_t>(g.world)];
  g.mail = mail;
  return mail->in == nullptr || mail->out == nullptr ? -ENOMEM : 0;
}

void close_mail(NdGroup& g) {
  if (g.mail == nullptr) return;
  if (g.mail->has_thread) {
    g.mail->mutex.lock();
    g.mail->stop = true;
    g.mail->mutex.unlock();
    g.mail->work.notify_one();
    ring(g, g.rank);
    pthread_join(g.mail->thread, nullptr);
  }
  for (int p = 0; p < g.world && g.mail->in != nullptr; ++p) {
    free(g.mail->in[p].parcel);
    for (Parcel* parcel = g.mail->in[p].first; parcel != nullptr;) {
      Parcel* next = parcel->next;
      free(parcel);
      parcel = next;
    }
  }
  delete[] g.mail->in;
  delete[] g.mail->out;
  delete g.mail;
  g.mail = nullptr;
}

}  // namespace nd

using namespace nd;

int nd_send_start(NdGroup* group, const void* buf, size_t bytes, int dtype, int peer, int tag, int background,
                  NdRequest** out) {
  const NdCall call{ND_SEND, 0, static_cast<uint8_t>(dtype), 0, peer, bytes};
  return start(group, call, static_cast<char*>(const_cast<void*>(buf)), tag, background, out);
}

int nd_recv_start(NdGroup* group, void* buf, size_t bytes, int dtype, int peer, int tag, int background,
                  NdRequest** out) {
  const NdCall call{ND_RECV, 0, static_cast<uint8_t>(dtype), 0, peer, bytes};
  return start(group, call, static_cast<char*>(buf), tag, background, out);
}

int nd_message_test(NdGroup* group, NdRequest* r) {
  if (group->magic != kMagic) return -ECHILD;
  const std::lock_guard<std::mutex> lock(group->mail->mutex);
  if (const int code = progress(*group, *group->mail)) return code;
  return r->state.load(std::memory_order_acquire);
}

// Until the request is done or the deadline; then `soft` returns 1, else the group fails.
static int wait_until(NdGroup& g, NdRequest* r, uint64_t deadline, bool soft) {
  if (g.magic != kMagic) return -ECHILD;
  Bell& bell = g.parts[g.rank].control.mail;
  const uint64_t begin = now_ns();
  for (;;) {
    const uint64_t seen = bell.value.load(std::memory_order_acquire);
    const int state = nd_message_test(&g, r);
    if (state != 1) return state;
    const uint64_t now = now_ns(), waited = now - begin;
    if (soft && now >= deadline) return 1;
    if (waited < g.options.spin_ns) {
      cpu_relax();
      continue;
    }
    // A poll that is over fails nobody, also when the clock reaches its deadline just here.
    if (const int code = check_request(g, *r, soft ? UINT64_MAX : deadline)) return code;
    if (waited < g.options.spin_ns + kYieldNs)
      sched_yield();
    else
      sleep_on(bell, seen);
  }
}

int nd_message_wait(NdGroup* g, NdRequest* r, uint64_t timeout_ns) {
  return wait_until(*g, r, now_ns() + (timeout_ns != 0 ? timeout_ns : g->options.timeout_ns), false);
}

int nd_message_poll(NdGroup* g, NdRequest* r, uint64_t timeout_ns) {
  return wait_until(*g, r, now_ns() + timeout_ns, true);
}

int nd_message_source(NdRequest* r, uint64_t* bytes, int* dtype) {
  *bytes = r->done;
  *dtype = r->came_dtype;
  return r->source;
}

// Take a receive that nothing has come for out of the list.
static bool withdraw(Mail& mail, NdRequest* r) {
  for (NdRequest** at = &mail.receives.first; *at != nullptr; at = &(*at)->next) {
    if (*at != r) continue;
    mail.receives.remove(at);
    --mail.num_running;
    return true;
  }
  return false;
}

int nd_message_free(NdGroup* group, NdRequest* r) {
  if (group->magic != kMagic) return -ECHILD;
  Mail& mail = *group->mail;
  const std::lock_guard<std::mutex> lock(mail.mutex);
  if (r->state.load(std::memory_order_acquire) == 1 && !withdraw(mail, r) &&
      group->failed.load(std::memory_order_acquire) == 0)
    return -EBUSY;
  delete r;
  return 0;
}

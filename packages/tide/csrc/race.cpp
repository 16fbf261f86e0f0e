#include "race.h"

#include "stack.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/profiler/combined_traceback.h>

#include <algorithm>

namespace tide {

// More reports than this help nobody, and a loop of races must not eat the host's memory.
constexpr size_t kMaxReports = 1000;

OriginPtr capture_origin(std::string what, int agent) {
  auto origin = std::make_shared<Origin>();
  origin->what = std::move(what);
  origin->agent = agent;
  if (const auto node = torch::autograd::get_current_node()) {
    origin->node = node->name();
  }
  origin->stack = torch::CapturedTraceback::gather(/*python=*/true, /*script=*/false, /*cpp=*/false);
  return origin;
}

std::vector<StackFrame> frames_of(const Origin& origin) {
  std::vector<StackFrame> frames;
  if (origin.stack) {
    const auto symbols = torch::symbolize({origin.stack.get()});
    for (const auto index : symbols.tracebacks.at(0)) {
      const auto& frame = symbols.all_frames.at(index);
      frames.push_back({frame.filename, frame.lineno, frame.funcname});
    }
  }
  return frames;
}

std::vector<OriginPtr> RaceDetector::access(
    const Access& access, int agent, uint64_t tick, const VectorClock& seen, const OriginPtr& origin) {
  std::vector<OriginPtr> raced;
  if (access.begin >= access.end) {
    return raced;
  }
  const auto conflict = [&](const char* kind, const Touch& first) {
    report(kind, first, origin, access);
    raced.push_back(first.origin);
  };
  const auto unordered = [&](const Touch& touch) {
    return touch.agent >= 0 && touch.agent != agent && !seen.covers(touch.agent, touch.tick);
  };

  split(access.begin);
  split(access.end);
  auto it = ranges_.lower_bound(access.begin);
  uintptr_t covered = access.begin;
  while (covered < access.end) {
    if (it == ranges_.end() || it->first >= access.end || it->first > covered) {
      // A gap nobody has touched yet.
      const uintptr_t end =
          it == ranges_.end() ? access.end : std::min<uintptr_t>(it->first, access.end);
      it = ranges_.emplace_hint(it, covered, Range{end, {}, {}});
    }
    Range& range = it->second;
    if (unordered(range.write)) {
      conflict(access.write ? "write after write" : "read after write", range.write);
    }
    if (access.write) {
      for (const Touch& read : range.reads) {
        if (unordered(read)) {
          conflict("write after read", read);
        }
      }
      range.reads.clear();
      range.write = Touch{agent, tick, origin};
    } else {
      const auto mine = std::find_if(
          range.reads.begin(), range.reads.end(), [&](const Touch& t) { return t.agent == agent; });
      if (mine == range.reads.end()) {
        range.reads.push_back(Touch{agent, tick, origin});
      } else {
        *mine = Touch{agent, tick, origin};
      }
    }
    covered = range.end;
    ++it;
  }

  // A whole-range write leaves many equal neighbours behind (views were touched one by one
  // before): melt them, or the map grows with every slice ever taken.
  if (access.write) {
    auto first = ranges_.find(access.begin);
    auto next = std::next(first);
    while (next != ranges_.end() && next->first < access.end) {
      first->second.end = next->second.end;
      next = ranges_.erase(next);
    }
  }
  return raced;
}

void RaceDetector::split(uintptr_t at) {
  auto it = ranges_.upper_bound(at);
  if (it == ranges_.begin()) {
    return;
  }
  --it;
  if (it->first < at && at < it->second.end) {
    Range right = it->second;
    it->second.end = at;
    ranges_.emplace(at, std::move(right));
  }
}

void RaceDetector::forget(uintptr_t begin, uintptr_t end) {
  split(begin);
  split(end);
  ranges_.erase(ranges_.lower_bound(begin), ranges_.lower_bound(end));
}

void RaceDetector::settle(uintptr_t begin, uintptr_t end, const VectorClock& seen) {
  split(begin);
  split(end);
  const auto last = ranges_.lower_bound(end);
  for (auto it = ranges_.lower_bound(begin); it != last; ++it) {
    auto& range = it->second;
    const auto over = [&](const Touch& t) { return t.agent >= 0 && seen.covers(t.agent, t.tick); };
    if (over(range.write)) {
      range.write = Touch{};
    }
    range.reads.erase(
        std::remove_if(range.reads.begin(), range.reads.end(), over), range.reads.end());
  }
}

void RaceDetector::report(
    const char* kind, const Touch& first, const OriginPtr& second, const Access& access) {
  // One pair of actions is one report, in however many pieces and ways they meet.
  for (auto it = reports_.rbegin(); it != reports_.rend() && it->second == second; ++it) {
    if (it->first == first.origin) {
      return;
    }
  }
  if (reports_.size() < kMaxReports) {
    reports_.push_back(Report{kind, first.origin, second, access.begin, access.end});
  }
}

} // namespace tide

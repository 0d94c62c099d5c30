// Draws on a device: those of a generator of the CPU with the same seed, after as many numbers as the offset says.
//
// A CUDA generator holds a seed and an offset. Here the offset is four times the number of 32-bit words that have been
// drawn; so its state is complete, and can be saved and set. A draw that leaves half of a pair of normal numbers behind
// loses it.
#pragma once
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <cstring>
#include <map>

// A generator of the CPU that continues where one of a device stands.
class Continued {
 public:
  Continued(at::Generator of, c10::Device device) : of_(std::move(of)) {
    if (!of_.defined() || of_.device().type() != c10::kCUDA) of_ = at::globalContext().defaultGenerator(device);
    std::lock_guard<std::mutex> lock(of_.mutex());
    seed_ = of_.current_seed();
    words_ = of_.get_offset() / 4;
    cpu_ = at::detail::createCPUGenerator(seed_);
    auto* implementation = at::check_generator<at::CPUGeneratorImpl>(cpu_);
    auto latest = latest_.find(seed_);
    bool known = latest != latest_.end() && latest->second.first == words_;
    auto engine = known ? latest->second.second : at::mt19937(seed_);
    for (uint64_t i = 0; !known && i < words_; i++) engine();
    implementation->set_engine(engine);
    begin_ = engine;
  }

  const at::Generator& cpu() const { return cpu_; }

  // After the draw: the device's generator moves on by as many words.
  void move_on() {
    auto* implementation = at::check_generator<at::CPUGeneratorImpl>(cpu_);
    auto end = implementation->engine();
    while (!same(begin_, end)) {
      begin_();
      words_++;
    }
    std::lock_guard<std::mutex> lock(of_.mutex());
    of_.set_offset(words_ * 4);
    latest_[seed_] = {words_, end};
  }

 private:
  static bool same(const at::mt19937& a, const at::mt19937& b) {
    auto x = a.data(), y = b.data();
    return x.next_ == y.next_ && x.left_ == y.left_ && x.state_ == y.state_;
  }

  at::Generator of_, cpu_;
  uint64_t seed_, words_;
  at::mt19937 begin_;
  // Of each seed the latest place, not to begin anew for each draw.
  static inline auto& latest_ = *new std::map<uint64_t, std::pair<uint64_t, at::mt19937>>;
};

// For operations that draw without an argument for a generator: the default one of the CPU stands for it meanwhile.
class ForDefault {
 public:
  explicit ForDefault(Continued& draws)
      : draws_(draws), default_(at::detail::getDefaultCPUGenerator()), saved_(default_.get_state()) {
    default_.set_state(draws.cpu().get_state());
  }
  ~ForDefault() {
    draws_.cpu().get<at::CPUGeneratorImpl>()->set_engine(default_.get<at::CPUGeneratorImpl>()->engine());
    default_.set_state(saved_);
  }

 private:
  Continued& draws_;
  at::Generator default_;
  at::Tensor saved_;
};

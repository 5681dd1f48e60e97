// Finds tokens that are matched as literal text before anything else (special and other added tokens).
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace shoal {

class AddedTokenMatcher {
 public:
  /// `text` must not be empty.
  void add(std::string text, int32_t id) {
    auto& bucket = by_first_byte_[static_cast<unsigned char>(text[0])];
    const auto shorter = [&](const Entry& e) { return e.text.size() < text.size(); };
    const auto place = std::find_if(bucket.begin(), bucket.end(), shorter);
    bucket.insert(place, {std::move(text), id});
    empty_ = false;
  }
  bool empty() const { return empty_; }

  /// Calls on_text for the stretches without a token (never empty) and on_token for each token, in text
  /// order. Leftmost match first, the longest one at equal places.
  template <class OnText, class OnToken>
  void for_each_piece(std::string_view text, const OnText& on_text, const OnToken& on_token) const {
    size_t begin = 0;
    for (size_t i = 0; !empty_ && i < text.size();) {
      const Entry* found = match(text.substr(i));
      if (found == nullptr) {
        i++;
        continue;
      }
      if (i > begin) on_text(text.substr(begin, i - begin));
      on_token(found->id);
      i += found->text.size();
      begin = i;
    }
    if (begin < text.size()) on_text(text.substr(begin));
  }

 private:
  struct Entry {
    std::string text;
    int32_t id;
  };
  const Entry* match(std::string_view text) const {
    for (const auto& entry : by_first_byte_[static_cast<unsigned char>(text[0])]) {
      if (text.starts_with(entry.text)) return &entry;
    }
    return nullptr;
  }

  std::array<std::vector<Entry>, 256> by_first_byte_;  // each longest first
  bool empty_ = true;
};

}  // namespace shoal

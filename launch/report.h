// `shoal report`: one self-contained HTML page about one or several runs. Charts are inline SVG; the page
// loads nothing from elsewhere and prints well.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace shoal {

/// `runs`: run folders or metrics files, drawn over each other. UsageError when there is none or one of them
/// cannot be found; Error when the page cannot be written. The page replaces an older one atomically.
void write_report(const std::vector<std::filesystem::path>& runs, const std::filesystem::path& output);

/// The page as text.
std::string render_report(const std::vector<std::filesystem::path>& runs);

}  // namespace shoal

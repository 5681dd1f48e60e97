// Progress as JSON.
#include <nlohmann/json.hpp>

#include "launch/trainer.h"

namespace shoal {

std::string Progress::to_json() const {
  return nlohmann::json{{"step", step},
                        {"tokens", tokens},
                        {"samples", samples},
                        {"skipped", skipped},
                        {"optimizer_steps", optimizer_steps},
                        {"data_fingerprint", data_fingerprint}}
      .dump(2);
}

Progress Progress::from_json(const std::string& json) {
  try {
    const nlohmann::json j = nlohmann::json::parse(json);
    Progress p;
    p.step = j.at("step");
    p.tokens = j.at("tokens");
    p.samples = j.at("samples");
    p.skipped = j.at("skipped");
    p.optimizer_steps = j.at("optimizer_steps");
    p.data_fingerprint = j.at("data_fingerprint");
    return p;
  } catch (const nlohmann::json::exception& e) {
    throw Error(str("checkpoint state: expected the progress of a training run, got something else (",
                    e.what(), ")"));
  }
}

}  // namespace shoal

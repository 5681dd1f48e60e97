#include <cmath>
#include <nlohmann/json.hpp>

#include "core/base/config.h"
#include "core/base/config_fields.h"

namespace shoal {

namespace {

using Json = nlohmann::ordered_json;

Json object_schema(const std::vector<FieldInfo>& fields);

// Bounds are doubles; whole ones are written as integers.
Json number(double value) {
  constexpr double kExact = 9007199254740992.0;  // 2^53
  if (std::floor(value) == value && std::abs(value) <= kExact) return static_cast<int64_t>(value);
  return value;
}

void add_constraint(Json& schema, const Constraint& constraint) {
  if (constraint.min)
    schema[constraint.exclusive_min ? "exclusiveMinimum" : "minimum"] = number(*constraint.min);
  if (constraint.max) schema["maximum"] = number(*constraint.max);
  if (!constraint.choices.empty()) schema["enum"] = constraint.choices;
  if (constraint.no_empty_text) schema["minLength"] = 1;
}

Json scalar_schema(const FieldInfo& field) {
  Json schema;
  switch (field.type) {
    case FieldType::boolean:
      schema["type"] = "boolean";
      break;
    case FieldType::integer:
      schema["type"] = "integer";
      break;
    case FieldType::number:
      schema["type"] = "number";
      break;
    case FieldType::auto_integer: {
      Json integer = {{"type", "integer"}};
      add_constraint(integer, field.constraint);
      return {{"anyOf", Json::array({integer, {{"const", "auto"}}})}};
    }
    default:
      schema["type"] = "string";
      break;
  }
  add_constraint(schema, field.constraint);
  return schema;
}

Json default_value(const FieldInfo& field, const std::string& text) {
  const bool is_text =
      field.type == FieldType::text || (field.type == FieldType::auto_integer && text == "auto");
  // A default that is not finite has no JSON form.
  Json value = is_text ? Json(text) : Json::parse(text, nullptr, false);
  return value.is_discarded() ? Json() : value;
}

Json choice_schema(const FieldInfo& field) {
  Json names = Json::array();
  for (const auto& kind : field.kinds) names.push_back(kind.name);
  Json forms = Json::array();
  if (!names.empty()) forms.push_back({{"description", "a kind with its default options"}, {"enum", names}});
  for (const auto& kind : field.kinds) {
    Json form = object_schema(kind.options);
    form["description"] = kind.doc;
    form["properties"]["kind"] = {{"const", kind.name}, {"description", kind.doc}};
    if (kind.name != field.current_kind) form["required"] = Json::array({"kind"});
    if (!kind.expanded) form.erase("additionalProperties");
    forms.push_back(std::move(form));
  }
  return {{"oneOf", forms}};
}

Json field_schema(const FieldInfo& field) {
  Json schema;
  switch (field.type) {
    case FieldType::section:
      schema = object_schema(field.children);
      break;
    case FieldType::section_list:
      schema = {{"type", "array"}, {"items", object_schema(field.children)}};
      break;
    case FieldType::choice:
      schema = choice_schema(field);
      if (!field.current_kind.empty()) schema["default"] = field.current_kind;
      break;
    default:
      schema = scalar_schema(field);
      if (field.is_list) {
        const Json list = {{"type", "array"}, {"items", schema}};
        schema = {{"anyOf", Json::array({list, schema})}};  // a list of one needs no brackets
      }
      Json values = Json::array();
      for (const auto& text : field.default_values) values.push_back(default_value(field, text));
      schema["default"] = field.is_list ? values : values[0];
  }
  schema["description"] = field.doc;
  return schema;
}

Json object_schema(const std::vector<FieldInfo>& fields) {
  Json properties = Json::object();
  for (const auto& field : fields) properties[field.key] = field_schema(field);
  return {{"type", "object"}, {"properties", properties}, {"additionalProperties", false}};
}

}  // namespace

std::string schema_of(const std::function<void(FieldVisitor&)>& fields) {
  Json schema = {{"$schema", "https://json-schema.org/draft/2020-12/schema"}};
  schema.update(object_schema(describe_fields(fields)));
  schema["properties"]["extends"] = {
      {"description", "file, or list of files, that this one is put on top of; relative to this file"},
      {"oneOf", Json::array({{{"type", "string"}}, {{"type", "array"}, {"items", {{"type", "string"}}}}})}};
  return schema.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace shoal

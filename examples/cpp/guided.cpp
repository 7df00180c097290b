// Guided decoding from C++: requests of four kinds of grammar run at once, each ends whenever it does, and one is cancelled.
//
//     guided [host:port]        default: the variable LOCKSTEP_SERVER, else 127.0.0.1:50051
//
// The class Executor has the calls of an executor in one's own process (enqueue, await any, cancel), over gRPC alone.
// examples/python/guided.py does the same and prints the same.

#include <grpcpp/grpcpp.h>

#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <iostream>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "protos/engine/v1/engine.grpc.pb.h"

namespace engine = lockstep::engine::v1;

namespace {

// What is new of a request.
struct Response {
  std::uint64_t request_id;
  std::string text;
  engine::FinishReason finish_reason = engine::FINISH_REASON_UNSPECIFIED;
  // Set in the last response of the request; not OK if it failed.
  std::optional<grpc::Status> status;
};

// Sends requests and queues their responses. Invariant: each request has exactly one response with a status, its last.
class Executor {
 public:
  explicit Executor(const std::shared_ptr<grpc::Channel>& channel) : stub_(engine::Engine::NewStub(channel)) {}

  // Cancels what still runs, and waits for its end.
  ~Executor() {
    std::unique_lock lock(mutex_);
    const auto running = running_;
    lock.unlock();  // gRPC may call back at once
    for (const auto& [id, call] : running) call->Cancel();
    lock.lock();
    changed_.wait(lock, [this] { return running_.empty(); });
  }

  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // Begins a request and returns its id. Any thread.
  std::uint64_t Enqueue(const engine::GenerateRequest& request) {
    std::unique_lock lock(mutex_);
    const std::uint64_t id = ++last_id_;
    const auto call = std::make_shared<Call>(*this, id, request);
    running_.emplace(id, call);
    lock.unlock();
    call->Begin(*stub_);
    return id;
  }

  // Ends a request; its last response has the status CANCELLED. Without effect on a request that has ended.
  void Cancel(std::uint64_t id) {
    std::unique_lock lock(mutex_);
    const auto found = running_.find(id);
    const auto call = found == running_.end() ? nullptr : found->second;
    lock.unlock();
    if (call) call->Cancel();
  }

  // Waits for the next response of any request.
  Response Await() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !responses_.empty(); });
    Response response = std::move(responses_.front());
    responses_.pop_front();
    return response;
  }

 private:
  // One call of Generate. gRPC's threads run the methods On...
  class Call final : public grpc::ClientReadReactor<engine::GenerateResponse> {
   public:
    Call(Executor& executor, std::uint64_t id, engine::GenerateRequest request)
        : executor_(executor), id_(id), request_(std::move(request)) {}

    void Begin(engine::Engine::Stub& stub) {
      stub.async()->Generate(&context_, &request_, this);
      StartRead(&message_);
      StartCall();
    }

    void Cancel() { context_.TryCancel(); }

    void OnReadDone(bool ok) override {
      if (!ok) return;  // OnDone follows
      executor_.Push({id_, message_.text(), message_.finish_reason(), std::nullopt});
      StartRead(&message_);
    }

    void OnDone(const grpc::Status& status) override { executor_.End(id_, status); }

   private:
    Executor& executor_;
    const std::uint64_t id_;
    const engine::GenerateRequest request_;
    grpc::ClientContext context_;
    engine::GenerateResponse message_;
  };

  void Push(Response response) {
    const std::lock_guard lock(mutex_);
    responses_.push_back(std::move(response));
    changed_.notify_all();
  }

  void End(std::uint64_t id, const grpc::Status& status) {
    const std::lock_guard lock(mutex_);
    responses_.push_back({id, "", engine::FINISH_REASON_UNSPECIFIED, status});
    running_.erase(id);  // the last owner deletes the call
    changed_.notify_all();
  }

  std::unique_ptr<engine::Engine::Stub> stub_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t last_id_ = 0;
  std::map<std::uint64_t, std::shared_ptr<Call>> running_;
  std::deque<Response> responses_;
};

engine::GenerateRequest Ask(const std::string& text, std::uint32_t max_tokens) {
  engine::GenerateRequest request;
  request.set_text(text);
  request.mutable_sampling()->set_max_tokens(max_tokens);
  request.mutable_sampling()->set_temperature(0);
  return request;
}

}  // namespace

int main(int argc, char** argv) {
  const char* variable = std::getenv("LOCKSTEP_SERVER");
  const std::string address = argc > 1 ? argv[1] : variable != nullptr ? variable : "127.0.0.1:50051";
  Executor executor(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));

  std::map<std::uint64_t, std::string> names;
  auto request = Ask("A JSON object: ", 48);
  request.mutable_grammar()->set_json_object(true);
  names[executor.Enqueue(request)] = "json";

  request = Ask("Oslo as JSON: ", 64);
  request.mutable_grammar()->set_json_schema(
      R"({"type": "object", "required": ["city", "people"], "additionalProperties": false, "properties": )"
      R"({"city": {"type": "string", "maxLength": 20}, "people": {"type": "integer"}}})");
  names[executor.Enqueue(request)] = "json_schema";

  request = Ask("The date of today: ", 32);
  request.mutable_grammar()->set_regex("[0-9]{4}-[0-9]{2}-[0-9]{2}");
  names[executor.Enqueue(request)] = "regex";

  request = Ask("The answer is ", 16);
  request.mutable_grammar()->set_ebnf("root ::= (\"yes\" | \"no\") \", \" [a-z]+ \".\"");
  names[executor.Enqueue(request)] = "ebnf";

  request = Ask("Once upon a time", 400);
  request.mutable_sampling()->set_ignore_eos(true);
  const std::uint64_t cancelled = executor.Enqueue(request);
  names[cancelled] = "cancelled";

  std::map<std::uint64_t, std::string> texts;
  std::map<std::string, std::string> lines;
  int failed = 0;
  while (lines.size() < names.size()) {
    const Response response = executor.Await();
    const std::string& name = names.at(response.request_id);
    texts[response.request_id] += response.text;
    if (response.request_id == cancelled && !response.text.empty()) executor.Cancel(cancelled);
    if (!response.status) continue;
    const grpc::Status& status = *response.status;
    if (response.request_id == cancelled && status.error_code() == grpc::StatusCode::CANCELLED) {
      lines[name] = "CANCELLED";
    } else if (status.ok()) {
      lines[name] = texts[response.request_id];
    } else {
      lines[name] = "error " + std::to_string(status.error_code()) + ": " + status.error_message();
      ++failed;
    }
  }
  for (const auto& [name, line] : lines) std::cout << name << ": " << line << '\n';
  return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

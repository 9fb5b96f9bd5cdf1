# What every target of this project is built with. Warnings are errors in our presets only, not for our users.
function(flashoverlap_target target)
  target_compile_features(${target} PUBLIC cxx_std_20)
  set_target_properties(${target} PROPERTIES CXX_EXTENSIONS OFF POSITION_INDEPENDENT_CODE ON)
  target_compile_options(
    ${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wpedantic;-Wshadow;-Wconversion;-Wsign-conversion>
                      $<$<AND:$<BOOL:${FLASHOVERLAP_WERROR}>,$<COMPILE_LANGUAGE:CXX>>:-Werror>)
  if(FLASHOVERLAP_SANITIZE)
    target_compile_options(${target} PRIVATE -fsanitize=${FLASHOVERLAP_SANITIZE} -fno-omit-frame-pointer
                                             -fno-sanitize-recover=all)
    target_link_options(${target} PRIVATE -fsanitize=${FLASHOVERLAP_SANITIZE})
  endif()
endfunction()
